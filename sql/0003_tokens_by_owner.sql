-- How many tokens a user has is asked whenever a job brings a new one.
CREATE INDEX IF NOT EXISTS workload_owner ON workload (owner_uid);

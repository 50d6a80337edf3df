-- Every job that carries a tag, from when the helper first sees it: Slurm gives ids anew, takes a requeued job's first
-- submission away, and other tools write AdminComment. What Slurm's restart count joins is one row.
CREATE TABLE IF NOT EXISTS job (
    id INTEGER /*! UNSIGNED AUTO_INCREMENT */ PRIMARY KEY,
    job_key VARCHAR(40) NOT NULL,              -- as squeue prints it: 14, 6_2
    job_id BIGINT NOT NULL,                    -- SLURM_JOB_ID; tasks of an array that wait share it
    uid BIGINT NOT NULL,
    first_submit_s BIGINT NOT NULL,
    submit_s BIGINT NOT NULL,                  -- as Slurm has it: a requeue resets it
    restarts INTEGER NOT NULL,
    start_s BIGINT,                            -- of its latest run
    end_s BIGINT,                              -- NULL while it waits or runs
    token VARCHAR(40),
    tag TEXT NOT NULL                          -- what AdminComment said last; empty: we took it off
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 */;
CREATE INDEX IF NOT EXISTS job_raw ON job (job_id, id);
CREATE INDEX IF NOT EXISTS job_end ON job (end_s);
CREATE INDEX IF NOT EXISTS job_token ON job (token);

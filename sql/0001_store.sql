-- The store's first schema. Plain SQL that SQLite and MariaDB both run: what only MariaDB needs stands
-- in /*! */, which SQLite takes for a comment. Times are Unix seconds. Every text column holds either a
-- value of ours (a token, a state, a JSON object of numbers) or a node or GPU name of a strict pattern.

-- Who may use a token: the user whose job brought it first.
CREATE TABLE IF NOT EXISTS workload (
    token VARCHAR(40) NOT NULL PRIMARY KEY,
    owner_uid BIGINT NOT NULL,
    created_s BIGINT NOT NULL,
    mem_floor_mib BIGINT NOT NULL DEFAULT 0,   -- raised when the job ran out of memory beside a neighbour
    change_seq BIGINT NOT NULL                 -- grows with every change that the hook's file must follow
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;
CREATE INDEX IF NOT EXISTS workload_change ON workload (change_seq);

-- What is known of a token on a GPU model: the robust combination of its runs.
CREATE TABLE IF NOT EXISTS profile (
    token VARCHAR(40) NOT NULL,
    gpu_model VARCHAR(80) NOT NULL,
    generation INTEGER NOT NULL,               -- a run much unlike the earlier ones starts the next
    runs INTEGER NOT NULL,                     -- runs combined, of this generation
    mem_used_mib BIGINT NOT NULL,
    mem_total_mib BIGINT NOT NULL,
    duration_s DOUBLE,                         -- median time of a whole job alone; NULL where none was seen
    features LONGTEXT NOT NULL,                -- JSON object of numbers
    scatter LONGTEXT NOT NULL,                 -- JSON object of numbers
    cluster INTEGER,
    model_version INTEGER,
    needs_cluster SMALLINT NOT NULL,
    restarted_s BIGINT,                        -- when this generation began, if it is not the first
    updated_s BIGINT NOT NULL,
    PRIMARY KEY (token, gpu_model)
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;
CREATE INDEX IF NOT EXISTS profile_needs_cluster ON profile (needs_cluster);

-- One record of a whole run. `waiting` until its job's tag is known, then `counted` (in a profile) or
-- `kept` (shared, or too short), `outranked` by a node's record, or `unresolved` if Slurm never knew the job.
CREATE TABLE IF NOT EXISTS run (
    id INTEGER /*! UNSIGNED AUTO_INCREMENT */ PRIMARY KEY,
    state VARCHAR(12) NOT NULL,
    by_node SMALLINT NOT NULL,                 -- 1: root of a node vouches for it, 0: a user
    author_uid BIGINT NOT NULL,
    run_id VARCHAR(32) NOT NULL,
    seq BIGINT NOT NULL,                       -- a later record of the same run replaces an earlier one
    token VARCHAR(40),
    job_id BIGINT NOT NULL,
    node VARCHAR(64) NOT NULL,                 -- empty where only a user vouches for it
    gpu_index INTEGER NOT NULL,
    gpu_model VARCHAR(80) NOT NULL,            -- empty where it was not measured
    start_s DOUBLE NOT NULL,
    end_s DOUBLE NOT NULL,
    alone_s DOUBLE NOT NULL,
    shared_s DOUBLE NOT NULL,
    generation INTEGER,                        -- of the profile that it is part of
    settled_seq BIGINT                         -- grows; given when its token became known
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;
CREATE UNIQUE INDEX IF NOT EXISTS run_once ON run (author_uid, run_id);
CREATE INDEX IF NOT EXISTS run_state ON run (state, id);
CREATE INDEX IF NOT EXISTS run_settled ON run (settled_seq);
CREATE INDEX IF NOT EXISTS run_token ON run (token, gpu_model, id);
CREATE INDEX IF NOT EXISTS run_job ON run (job_id);
CREATE INDEX IF NOT EXISTS run_end ON run (end_s);

-- The numbers of a run, apart from it so that reports over many runs read little.
CREATE TABLE IF NOT EXISTS run_detail (
    id INTEGER NOT NULL PRIMARY KEY,
    features LONGTEXT NOT NULL,                -- JSON object of numbers: what profiles are combined from
    body LONGTEXT NOT NULL                     -- the record
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;

-- The latest interim record of each running job.
CREATE TABLE IF NOT EXISTS interim (
    job_id BIGINT NOT NULL,
    node VARCHAR(64) NOT NULL,
    gpu_index INTEGER NOT NULL,
    author_uid BIGINT NOT NULL,
    run_id VARCHAR(32) NOT NULL,
    seq BIGINT NOT NULL,
    at_s DOUBLE NOT NULL,
    body LONGTEXT NOT NULL,
    PRIMARY KEY (job_id, node, gpu_index)
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;
CREATE INDEX IF NOT EXISTS interim_at ON interim (at_s);

-- Runs whose final record was taken in: what makes ingest happen once.
CREATE TABLE IF NOT EXISTS ingested (
    author_uid BIGINT NOT NULL,
    run_id VARCHAR(32) NOT NULL,
    seq BIGINT NOT NULL,
    end_s DOUBLE NOT NULL,
    PRIMARY KEY (author_uid, run_id)
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;
CREATE INDEX IF NOT EXISTS ingested_end ON ingested (end_s);

-- Sealed records that nodes write straight to a network database instead of the spool directory.
CREATE TABLE IF NOT EXISTS inbox (
    id INTEGER /*! UNSIGNED AUTO_INCREMENT */ PRIMARY KEY,
    received_s BIGINT NOT NULL,
    credential LONGTEXT NOT NULL
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;

-- Cluster models, each a JSON document; the highest version of a GPU model is in force.
CREATE TABLE IF NOT EXISTS model (
    version INTEGER /*! UNSIGNED AUTO_INCREMENT */ PRIMARY KEY,
    gpu_model VARCHAR(80) NOT NULL,
    created_s BIGINT NOT NULL,
    body LONGTEXT NOT NULL
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;
CREATE INDEX IF NOT EXISTS model_gpu ON model (gpu_model, version);

-- What was learned, as named JSON documents.
CREATE TABLE IF NOT EXISTS knowledge (
    name VARCHAR(190) NOT NULL PRIMARY KEY,
    updated_s BIGINT NOT NULL,
    body LONGTEXT NOT NULL
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;

-- Rates that were seen: how fast the victim ran beside the neighbour.
CREATE TABLE IF NOT EXISTS observation (
    id INTEGER /*! UNSIGNED AUTO_INCREMENT */ PRIMARY KEY,
    source VARCHAR(120) NOT NULL,              -- says what was measured where, so that it counts once
    gpu_model VARCHAR(80) NOT NULL,
    victim VARCHAR(40) NOT NULL,
    neighbour VARCHAR(40) NOT NULL,
    rate DOUBLE NOT NULL,
    weight DOUBLE NOT NULL,
    at_s BIGINT NOT NULL
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;
CREATE UNIQUE INDEX IF NOT EXISTS observation_source ON observation (source);
CREATE INDEX IF NOT EXISTS observation_victim ON observation (victim);
CREATE INDEX IF NOT EXISTS observation_at ON observation (at_s);

-- What the helper decided about a job, and why.
CREATE TABLE IF NOT EXISTS decision (
    id INTEGER /*! UNSIGNED AUTO_INCREMENT */ PRIMARY KEY,
    job_id BIGINT NOT NULL,
    at_s BIGINT NOT NULL,
    kind VARCHAR(16) NOT NULL,
    node VARCHAR(64),
    gpu_index INTEGER,
    partner_job BIGINT,
    rate DOUBLE,                               -- predicted, of this job beside the partner
    partner_rate DOUBLE,                       -- predicted, of the partner beside this job
    reasons LONGTEXT NOT NULL                  -- JSON
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;
CREATE INDEX IF NOT EXISTS decision_job ON decision (job_id, id);
CREATE INDEX IF NOT EXISTS decision_at ON decision (at_s);

-- Who shared a card with whom, from when to when; end_s is NULL while it lasts.
CREATE TABLE IF NOT EXISTS sharing (
    id INTEGER /*! UNSIGNED AUTO_INCREMENT */ PRIMARY KEY,
    resident_job BIGINT NOT NULL,
    guest_job BIGINT NOT NULL,
    resident_token VARCHAR(40) NOT NULL,
    guest_token VARCHAR(40) NOT NULL,
    node VARCHAR(64) NOT NULL,
    gpu_index INTEGER NOT NULL,
    gpu_model VARCHAR(80) NOT NULL,
    start_s BIGINT NOT NULL,
    end_s BIGINT,
    resident_rate DOUBLE,                      -- predicted
    guest_rate DOUBLE,
    resident_rate_seen DOUBLE,                 -- measured, once known
    guest_rate_seen DOUBLE
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;
CREATE UNIQUE INDEX IF NOT EXISTS sharing_once ON sharing (resident_job, guest_job, start_s);
CREATE INDEX IF NOT EXISTS sharing_guest ON sharing (guest_job);
CREATE INDEX IF NOT EXISTS sharing_start ON sharing (start_s);
CREATE INDEX IF NOT EXISTS sharing_end ON sharing (end_s);

-- Tokens that slowed each other past what was promised: never again on one card. token_a <= token_b.
CREATE TABLE IF NOT EXISTS never_pair (
    token_a VARCHAR(40) NOT NULL,
    token_b VARCHAR(40) NOT NULL,
    at_s BIGINT NOT NULL,
    PRIMARY KEY (token_a, token_b)
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;

CREATE TABLE IF NOT EXISTS heartbeat (
    name VARCHAR(32) NOT NULL PRIMARY KEY,
    at_s BIGINT NOT NULL
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;

CREATE TABLE IF NOT EXISTS counter (
    name VARCHAR(32) NOT NULL PRIMARY KEY,
    value BIGINT NOT NULL
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;
-- The row that writers lock on MariaDB, so that they take turns as they do on SQLite.
REPLACE INTO counter (name, value) VALUES ('writer', 0);

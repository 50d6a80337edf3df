-- What jobs did to others that nobody had foreseen: who must be measured anew, who was not what it had been measured
-- to be, and who was slowed past a promise by whom.

-- Tokens whose profile holds no longer: they share again after a run on a whole card that began later.
CREATE TABLE IF NOT EXISTS remeasure (
    token VARCHAR(40) NOT NULL PRIMARY KEY,
    since_s BIGINT NOT NULL
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;

-- One row each time that a running job was past its profile.
CREATE TABLE IF NOT EXISTS strike (
    id INTEGER /*! UNSIGNED AUTO_INCREMENT */ PRIMARY KEY,
    at_s BIGINT NOT NULL,
    uid BIGINT NOT NULL,
    token VARCHAR(40) NOT NULL,
    job_id BIGINT NOT NULL,
    partner_job BIGINT,                        -- who was on the card beside it, if anybody was
    feature VARCHAR(40) NOT NULL,              -- which number
    seen DOUBLE NOT NULL,
    profiled DOUBLE NOT NULL
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;
CREATE INDEX IF NOT EXISTS strike_uid ON strike (uid, at_s);
CREATE INDEX IF NOT EXISTS strike_at ON strike (at_s);

-- The audit trail: a job that was slowed past what it was promised, and beside whom.
CREATE TABLE IF NOT EXISTS broken_promise (
    id INTEGER /*! UNSIGNED AUTO_INCREMENT */ PRIMARY KEY,
    at_s BIGINT NOT NULL,
    job_id BIGINT NOT NULL,
    uid BIGINT NOT NULL,
    by_job BIGINT NOT NULL,
    by_uid BIGINT NOT NULL,
    node VARCHAR(64) NOT NULL,
    gpu_index INTEGER NOT NULL,
    promised_pct DOUBLE NOT NULL,
    slowed_pct DOUBLE NOT NULL
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;
CREATE INDEX IF NOT EXISTS broken_promise_at ON broken_promise (at_s);

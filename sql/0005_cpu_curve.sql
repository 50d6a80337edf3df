-- How fast a workload is with how many CPUs, as its owner measured it (gpushare profile --cpus): one curve a token.
CREATE TABLE IF NOT EXISTS cpu_curve (
    token VARCHAR(40) NOT NULL PRIMARY KEY,
    cpus INTEGER NOT NULL,                     -- the fewest with which it is nearly as fast as with any
    at_s BIGINT NOT NULL,                      -- when it was measured
    points LONGTEXT NOT NULL                   -- JSON: [[CPUs, speed over the fastest], ...]
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin */;

-- Who is to stand still, where nodes and controller share no file system (RecordsTo=store).
CREATE TABLE IF NOT EXISTS stop_order (
    node VARCHAR(64) NOT NULL PRIMARY KEY,
    line TEXT NOT NULL                         -- as in SpoolDir/hold/stops/NODE
) /*! ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 */;

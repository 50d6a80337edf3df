-- The file that the submit hook reads: one look-up by primary key. A copy of what the store knows, so it
-- can always be made anew. `change_seq` is the store's last change that is in here; `gangs` is 1 where gangs may share.
CREATE TABLE workload (
    token TEXT PRIMARY KEY,
    uid INTEGER NOT NULL,
    clusters TEXT NOT NULL, -- MODEL=CLUSTER/GPUS/MIB on each GPU model on which it was measured: a100=0/1/9011,v100=2/1/8234
    cpus INTEGER -- what its CPU curve says; NULL where none was measured
) WITHOUT ROWID;
CREATE TABLE helper (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    heartbeat_s INTEGER NOT NULL,
    change_seq INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    gangs INTEGER NOT NULL DEFAULT 0
);
INSERT INTO helper (id, heartbeat_s, change_seq, epoch) VALUES (1, 0, 0, 0);

-- The file that the submit hook reads: one look-up by primary key. A copy of what the store knows, so it
-- can always be made anew. `change_seq` is the store's last change that is in here.
CREATE TABLE workload (
    token TEXT PRIMARY KEY,
    uid INTEGER NOT NULL,
    cluster INTEGER NOT NULL,
    mem_used_mib INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE helper (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    heartbeat_s INTEGER NOT NULL,
    change_seq INTEGER NOT NULL,
    epoch INTEGER NOT NULL
);
INSERT INTO helper VALUES (1, 0, 0, 0);

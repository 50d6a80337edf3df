-- Tables that said the same are one, and every row is kept. What a MariaDB that was cut short has done already is not
-- done again: old tables are there once more, empty, and nothing is copied twice.
CREATE TABLE IF NOT EXISTS remeasure (token VARCHAR(40) NOT NULL PRIMARY KEY, since_s BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS cpu_curve (token VARCHAR(40) NOT NULL PRIMARY KEY, cpus INTEGER NOT NULL, at_s BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS heartbeat (name VARCHAR(32) NOT NULL PRIMARY KEY, at_s BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS model (version INTEGER NOT NULL PRIMARY KEY, gpu_model VARCHAR(80) NOT NULL,
    created_s BIGINT NOT NULL, body LONGTEXT NOT NULL);
CREATE TABLE IF NOT EXISTS strike (id INTEGER NOT NULL PRIMARY KEY, at_s BIGINT NOT NULL, uid BIGINT NOT NULL,
    token VARCHAR(40) NOT NULL, job_id BIGINT NOT NULL, partner_job BIGINT, feature VARCHAR(40) NOT NULL,
    seen DOUBLE NOT NULL, profiled DOUBLE NOT NULL);
CREATE TABLE IF NOT EXISTS broken_promise (id INTEGER NOT NULL PRIMARY KEY, at_s BIGINT NOT NULL, job_id BIGINT NOT NULL,
    uid BIGINT NOT NULL, by_job BIGINT NOT NULL, by_uid BIGINT NOT NULL, node VARCHAR(64) NOT NULL,
    gpu_index INTEGER NOT NULL, promised_pct DOUBLE NOT NULL, slowed_pct DOUBLE NOT NULL);
CREATE TABLE IF NOT EXISTS interim (job_id BIGINT NOT NULL, node VARCHAR(64) NOT NULL, gpu_index INTEGER NOT NULL,
    author_uid BIGINT NOT NULL, run_id VARCHAR(32) NOT NULL, seq BIGINT NOT NULL, at_s DOUBLE NOT NULL,
    body LONGTEXT NOT NULL, PRIMARY KEY (job_id, node, gpu_index));
CREATE TABLE IF NOT EXISTS ingested (author_uid BIGINT NOT NULL, run_id VARCHAR(32) NOT NULL, seq BIGINT NOT NULL,
    end_s DOUBLE NOT NULL, PRIMARY KEY (author_uid, run_id));
-- Of a token: since when it must be measured anew; the fewest CPUs with which it is nearly as fast as with any.
ALTER TABLE workload ADD COLUMN /*! IF NOT EXISTS */ measure_since_s BIGINT;
ALTER TABLE workload ADD COLUMN /*! IF NOT EXISTS */ cpus INTEGER;
ALTER TABLE workload ADD COLUMN /*! IF NOT EXISTS */ cpus_at_s BIGINT;
-- 1: the record of a run that has ended, 0: the latest record of one that goes on (state `running`) or of which no
-- more was heard. A run whose job took no part is `dropped`: of it only author, id and end are kept.
ALTER TABLE run ADD COLUMN /*! IF NOT EXISTS */ final SMALLINT NOT NULL DEFAULT 1;
CREATE INDEX IF NOT EXISTS decision_kind ON decision (kind, at_s);
UPDATE workload SET measure_since_s = (SELECT m.since_s FROM remeasure m WHERE m.token = workload.token)
    WHERE token IN (SELECT token FROM remeasure);
UPDATE workload SET cpus = (SELECT c.cpus FROM cpu_curve c WHERE c.token = workload.token),
    cpus_at_s = (SELECT c.at_s FROM cpu_curve c WHERE c.token = workload.token)
    WHERE token IN (SELECT token FROM cpu_curve);
-- REPLACE joins texts in both databases alike.
REPLACE INTO counter (name, value) SELECT REPLACE('alive_@', '@', name), at_s FROM heartbeat;
REPLACE INTO knowledge (name, updated_s, body)
    SELECT REPLACE(REPLACE('clusters/@/#', '#', version), '@', gpu_model), created_s, body FROM model;
INSERT INTO decision (job_id, at_s, kind, partner_job, reasons)
    SELECT s.job_id, s.at_s, 'strike', s.partner_job, s.reasons FROM (SELECT id, job_id, at_s, partner_job,
        REPLACE(REPLACE(REPLACE(REPLACE(REPLACE('{"uid":@1,"token":"@2","feature":"@3","seen":@4,"profiled":@5}',
            '@1', uid), '@2', token), '@3', feature), '@4', seen), '@5', profiled) AS reasons FROM strike) AS s
    WHERE NOT EXISTS (SELECT 1 FROM decision d WHERE d.job_id = s.job_id AND d.at_s = s.at_s AND d.kind = 'strike'
        AND d.reasons = s.reasons) ORDER BY s.id;
INSERT INTO decision (job_id, at_s, kind, node, gpu_index, partner_job, reasons)
    SELECT b.job_id, b.at_s, 'broken-promise', b.node, b.gpu_index, b.by_job, b.reasons FROM (
        SELECT id, job_id, at_s, node, gpu_index, by_job,
        REPLACE(REPLACE(REPLACE(REPLACE('{"uid":@1,"by_uid":@2,"promised_pct":@3,"slowed_pct":@4}',
            '@1', uid), '@2', by_uid), '@3', promised_pct), '@4', slowed_pct) AS reasons FROM broken_promise) AS b
    WHERE NOT EXISTS (SELECT 1 FROM decision d WHERE d.job_id = b.job_id AND d.at_s = b.at_s
        AND d.kind = 'broken-promise' AND d.reasons = b.reasons) ORDER BY b.id;
INSERT INTO run (state, by_node, author_uid, run_id, seq, job_id, node, gpu_index, gpu_model, start_s, end_s, alone_s,
    shared_s, final)
    SELECT 'dropped', 0, g.author_uid, g.run_id, g.seq, 0, '', 0, '', g.end_s, g.end_s, 0, 0, 1 FROM ingested g
    WHERE NOT EXISTS (SELECT 1 FROM run r WHERE r.author_uid = g.author_uid AND r.run_id = g.run_id);
INSERT INTO run (state, by_node, author_uid, run_id, seq, job_id, node, gpu_index, gpu_model, start_s, end_s, alone_s,
    shared_s, final)
    SELECT 'running', 1, i.author_uid, i.run_id, i.seq, i.job_id, i.node, i.gpu_index, '', i.at_s, i.at_s, 0, 0, 0
    FROM interim i
    WHERE NOT EXISTS (SELECT 1 FROM run r WHERE r.author_uid = i.author_uid AND r.run_id = i.run_id);
INSERT INTO run_detail (id, features, body)
    SELECT r.id, '{}', i.body FROM interim i JOIN run r ON r.author_uid = i.author_uid AND r.run_id = i.run_id
    WHERE r.state = 'running' AND NOT EXISTS (SELECT 1 FROM run_detail d WHERE d.id = r.id);
DROP TABLE IF EXISTS remeasure;
DROP TABLE IF EXISTS cpu_curve;
DROP TABLE IF EXISTS heartbeat;
DROP TABLE IF EXISTS model;
DROP TABLE IF EXISTS strike;
DROP TABLE IF EXISTS broken_promise;
DROP TABLE IF EXISTS interim;
DROP TABLE IF EXISTS ingested;

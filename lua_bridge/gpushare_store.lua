-- hook.sqlite, the small file that the helper maintains: one look-up by primary key, read-only.

local load = ...
local is_token = load("gpushare_consent").is_token

local M = {}

-- A replaced or moved file is noticed when the connection is made anew; making one costs a tenth of a millisecond.
M.REOPEN_SECONDS = 2
-- The helper's own transactions take about this long; slurmctld must not wait longer.
M.BUSY_MILLISECONDS = 5

local driver, environment, connection, opened_at, opened_path

function M.close()
  if connection then
    pcall(connection.close, connection)
  end
  connection = nil
end

local function uri(path)
  -- mode=ro: neither creates nor writes. Where SQLite takes no URIs, this names a directory "file:" that does not
  -- exist, so that the worst outcome is an error.
  return "file:" .. path:gsub("[%%?#]", function(char)
    return string.format("%%%02X", char:byte())
  end) .. "?mode=ro"
end

local function open(path)
  if not driver then
    driver = require("luasql.sqlite3")
    environment = driver.sqlite3()
  end
  if path:sub(1, 1) ~= "/" then
    error("HookFile is not an absolute path")
  end
  local made, why = environment:connect(uri(path), M.BUSY_MILLISECONDS)
  if not made then
    error(tostring(why))
  end
  connection, opened_at, opened_path = made, os.time(), path
end

local function query(token)
  local cursor, why = connection:execute(
    "SELECT heartbeat_s, gangs, uid, clusters, cpus FROM helper LEFT JOIN workload ON token = '"
      .. (token or "")
      .. "' WHERE id = 1"
  )
  if not cursor or type(cursor) == "number" then
    error(tostring(why))
  end
  local ok, heartbeat_s, gangs, uid, clusters, cpus = pcall(cursor.fetch, cursor)
  pcall(cursor.close, cursor)
  if not ok then
    error(heartbeat_s, 0)
  end
  return {
    heartbeat_s = tonumber(heartbeat_s),
    gangs = tonumber(gangs) == 1,
    stale = tonumber(gangs) == -1,
    uid = tonumber(uid),
    clusters = clusters,
    cpus = tonumber(cpus),
  }
end

-- Takes "MODEL=CLUSTER/GPUS,..." apart: the cluster on each GPU model on which the workload was measured, and on how
-- many GPUs that was.
local function by_model(text)
  local clusters, gpus = {}, {}
  for model, cluster, count in (text or ""):gmatch("([^,=]+)=(%d+)/?(%d*)") do
    clusters[model], gpus[model] = tonumber(cluster), tonumber(count) or 1
  end
  return clusters, gpus
end

-- What is known of `token`: {uid, clusters and gpus by model, cpus = those that its curve says, if it has one}, empty if
-- nothing is or no token is given; and of the helper: {heartbeat_s, gangs = whether gangs may share, stale = whether it
-- has found another Slurm than configure did}. Raises when the file cannot be read.
function M.look_up(path, token)
  if token ~= nil and not is_token(token) then
    error("not a token")
  end
  local now = os.time()
  if connection and (opened_path ~= path or now < opened_at or now - opened_at >= M.REOPEN_SECONDS) then
    M.close()
  end
  local fresh = connection == nil
  if fresh then
    open(path)
  end
  local ok, found = pcall(query, token)
  if not ok and not fresh then
    -- The file may have been replaced under an open connection: one more try with a new one.
    M.close()
    open(path)
    ok, found = pcall(query, token)
  end
  if not ok then
    M.close()
    error(found, 0)
  end
  found.clusters, found.gpus = by_model(found.clusters)
  return found
end

return M

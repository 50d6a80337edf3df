-- hook.sqlite, the small file that the helper maintains: one look-up by primary key, read-only.

local M = {}

-- A replaced or moved file is noticed when the connection is made anew; making one costs a tenth of a millisecond.
M.REOPEN_SECONDS = 2
-- The helper's own transactions take about this long; slurmctld must not wait longer.
M.BUSY_MILLISECONDS = 5
M.TOKEN_MIN, M.TOKEN_MAX = 16, 32

local driver, environment, connection, opened_at, opened_path

-- At least 80 bits of base 32, as in slurm_gpushare/slurm/tag.py. Nothing else ever meets SQL.
function M.is_token(text)
  local random = type(text) == "string" and text:match("^gs%-([a-z2-7]+)$")
  return random ~= nil and random ~= false and #random >= M.TOKEN_MIN and #random <= M.TOKEN_MAX
end

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
    "SELECT (SELECT heartbeat_s FROM helper WHERE id = 1), uid, cluster FROM workload WHERE token = '" .. token .. "'"
  )
  if not cursor or type(cursor) == "number" then
    error(tostring(why))
  end
  local ok, heartbeat, uid, cluster = pcall(cursor.fetch, cursor)
  pcall(cursor.close, cursor)
  if not ok then
    error(heartbeat, 0)
  end
  return tonumber(heartbeat), tonumber(uid), tonumber(cluster)
end

-- What is known of `token`: {uid, cluster, heartbeat_s}, or nil if nothing. Raises when the file cannot be read.
function M.look_up(path, token)
  if not M.is_token(token) then
    error("not a token")
  end
  local now = os.time()
  if connection and (opened_path ~= path or now < opened_at or now - opened_at >= M.REOPEN_SECONDS) then
    M.close()
  end
  local heartbeat, uid, cluster
  local fresh = connection == nil
  if fresh then
    open(path)
  end
  local ok, why = pcall(function()
    heartbeat, uid, cluster = query(token)
  end)
  if not ok and not fresh then
    -- The file may have been replaced under an open connection: one more try with a new one.
    M.close()
    open(path)
    ok, why = pcall(function()
      heartbeat, uid, cluster = query(token)
    end)
  end
  if not ok then
    M.close()
    error(why, 0)
  end
  if uid == nil then
    return nil
  end
  return { uid = uid, cluster = cluster, heartbeat_s = heartbeat }
end

return M

-- Our tag in AdminComment, as slurm_gpushare/protocol/tag.py has it: one word, after whatever else is there.

local load = ...
local protocol = load("gpushare_protocol")

local M = {}

-- The fields that a submitted job may have, in the order in which they are written.
local FIELDS = { "cluster", "token", "original", "gang", "nodes", "lease", "max_isd_pct", "requeue" }

-- The tag with these values {field = text or whole number}. `probe`: of a workload that nobody knows.
function M.write(values, probe)
  local parts = { probe and "probe" or nil }
  for _, field in ipairs(FIELDS) do
    local value = values[field]
    if value ~= nil then
      local text = type(value) == "number" and string.format("%d", value) or value
      parts[#parts + 1] = protocol.LETTERS[field] .. "=" .. text
    end
  end
  return protocol.PREFIX .. table.concat(parts, ";")
end

-- What is in the tag of an AdminComment, without the prefix; nil if it has none.
function M.find(admin_comment)
  return (" " .. (admin_comment or "")):match("%s" .. protocol.PREFIX .. "(%S*)")
end

-- A field of such a text; nil if it is not there.
function M.field(tag, field)
  return (";" .. tag):match(";" .. protocol.LETTERS[field] .. "=([^;]*)")
end

-- `admin_comment` with `tag` in place of the one that it has.
function M.put(admin_comment, tag)
  local kept = (" " .. (admin_comment or "")):gsub("%s" .. protocol.PREFIX .. "%S*", ""):gsub("^%s+", "")
  return kept == "" and tag or kept .. " " .. tag
end

return M

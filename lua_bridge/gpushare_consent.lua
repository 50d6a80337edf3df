-- The user's consent in a job's comment. docs/hook.md has the grammar; slurm_gpushare/protocol/comment.py reads the same
-- one. The hook and the filter in the user's commands both use this file, and a test feeds all three with the same
-- comments.

local load = ...
local protocol = load("gpushare_protocol")
local LONGEST = protocol.LONGEST

local M = {}

M.TOO_LONG = "its comment is longer than " .. LONGEST .. " characters"
M.NO_TOKEN = "that is not a workload token. Make one with: gpushare token NAME"
M.TWO = "its comment says gpushare twice"
M.BAD_OPTION = "only the options max=PERCENT, requeue=yes|no and cpus=auto may follow the token, each once"

-- Nothing else ever meets SQL.
function M.is_token(text)
  local random = type(text) == "string" and text:match("^gs%-([a-z2-7]+)$")
  return random ~= nil and random ~= false and #random >= protocol.TOKEN_MIN and #random <= protocol.TOKEN_MAX
end

-- Whether the text says "gpushare" anywhere, in any case. Linear, and copies nothing.
function M.mentions(comment)
  return comment:find("[gG][pP][uU][sS][hH][aA][rR][eE]") ~= nil
end

-- Whether a word after the token is an option of ours; other words of the comment are somebody else's.
-- slurm_gpushare/protocol/tokens.py takes no such word in a name.
function M.is_option(word)
  local lowered = word:lower()
  local name = lowered:match("^(%a+)$") or lowered:match("^(%a+)[=:]")
  return name ~= nil and protocol.OPTIONS[name] == true
end

-- What the comment says: {token=..., max=..., requeue=..., cpus_auto=...}. nil if it says nothing of us; nil and the
-- reason if it is not understood.
function M.parse(comment)
  if not comment or not M.mentions(comment) then
    return nil
  elseif #comment > LONGEST then
    return nil, M.TOO_LONG
  end
  local ours, options
  for word in comment:gmatch("%S+") do
    local key, rest = word:match("^(%a+)(.*)$")
    if key and key:lower() == "gpushare" and (rest == "" or rest:match("^[:=]")) then
      if ours then
        return nil, M.TWO
      end
      ours, options = rest:sub(2):match("^([^,]*)(.*)$")
    elseif ours and M.is_option(word) then
      options = options .. "," .. word
    end
  end
  if not ours then
    return nil
  elseif not M.is_token(ours) then
    return nil, M.NO_TOKEN
  end
  local max, requeue, cpus_auto
  for option in options:gmatch("[^,]+") do
    local lowered = option:lower()
    local percent, answer = lowered:match("^max=(%d%d?%d?)%%?$"), lowered:match("^requeue=(%a+)$")
    if percent and not max then
      max = tonumber(percent)
    elseif (answer == "yes" or answer == "no") and requeue == nil then
      requeue = answer == "yes"
    elseif lowered == "cpus=auto" and not cpus_auto then
      cpus_auto = true
    else
      return nil, M.BAD_OPTION
    end
  end
  return { token = ours, max = max, requeue = requeue, cpus_auto = cpus_auto }
end

return M

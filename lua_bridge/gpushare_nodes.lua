-- Which partitions have nodes that share. Several partitions may have the same nodes, so the name alone says nothing.

local M = {}

-- A partition with more nodes than this is taken to have nodes that share: the names are gone through one by one.
M.MOST_NODES = 100000

-- Calls visit(name) for each name of one item, "gpu[0-2,7]" or "r[0-1]n[0-9]", until it answers true.
local function each_of_item(item, visit)
  local before, inside, after = item:match("^([^%[]*)%[([^%]]*)%](.*)$")
  if not before then
    return visit(item)
  end
  for part in inside:gmatch("[^,]+") do
    local low, high = part:match("^(%d+)%-(%d+)$")
    low = low or part
    for number = tonumber(low) or 0, tonumber(high or low) or 0 do
      local padded = string.format("%0" .. #low .. "d", number)
      if each_of_item(before .. padded .. after, visit) then
        return true
      end
    end
  end
  return false
end

-- Calls visit(name) for each node of a list as Slurm writes it, until it answers true. Whether it did.
function M.each(list, visit)
  local from, depth = 1, 0
  for at, char in (list .. ","):gmatch("()([,%[%]])") do
    if char ~= "," then
      depth = char == "[" and 1 or 0
    elseif depth == 0 then
      if at > from and each_of_item(list:sub(from, at - 1), visit) then
        return true
      end
      from = at + 1
    end
  end
  return false
end

-- The lists change only when somebody changes Slurm's configuration: one a model and one of all are remembered.
M.MOST_LISTS = 16
local known, lists = {}, 0

local function known_of(list)
  if not known[list] then
    local set = {}
    M.each(list, function(name)
      set[name] = true
    end)
    if lists >= M.MOST_LISTS then
      known, lists = {}, 0
    end
    known[list], lists = { set = set, answers = {} }, lists + 1
  end
  return known[list]
end

-- Whether two lists of nodes have a name in common.
function M.overlap(ours, theirs)
  if theirs:upper() == "ALL" then
    return ours ~= ""
  end
  local ours_known = known_of(ours)
  local set, answers = ours_known.set, ours_known.answers
  if answers[theirs] == nil then
    local seen = 0
    answers[theirs] = M.each(theirs, function(name)
      seen = seen + 1
      return set[name] or seen > M.MOST_NODES
    end)
  end
  return answers[theirs]
end

return M

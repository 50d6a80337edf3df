"""Our policy and its peers on a trace and measured pairs, with the helper's own plan function."""

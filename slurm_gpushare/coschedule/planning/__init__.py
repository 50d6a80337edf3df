"""The plan: a pure function from a snapshot, rates and settings to placements."""

"""The backfill helper: observe, plan (a pure function), apply."""

"""Who shares with whom since when, what it costs them, and what is learned from it."""

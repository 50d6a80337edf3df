"""``gpushare-lab``: one file a command."""

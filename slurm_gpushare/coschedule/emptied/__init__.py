"""Cards that have just become empty: hear of it, know what is known, tell the node to let go. See `answering`."""

"""Cards that have just become empty: hear of it at once, decide who gets the card, tell the node to let go."""

"""Other people's policies in the simulator."""

"""The emulated training job: its load, its progress beside neighbours, its checkpoint."""

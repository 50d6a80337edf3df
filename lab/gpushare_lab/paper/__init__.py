"""The paper: its characterisation of public workloads, and its experiment."""

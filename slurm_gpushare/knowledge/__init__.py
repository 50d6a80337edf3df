"""From telemetry to rates: clusters, the knowledge base, prediction, learning. Numbers in, numbers out."""

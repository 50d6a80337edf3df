"""The controller's memory: workloads, profiles, models, knowledge, decisions, observations. All SQL is here."""

"""Scripts, models and machines in, measured job and profile files for the planner out. ``cli`` calls it."""

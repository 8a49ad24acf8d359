"""All that a step's result depends on beside the user's state: recorded by a save, set and compared by a restore."""

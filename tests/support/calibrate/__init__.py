"""Training scripts of the kinds that people copy from tutorials, none of which calls deepvm. Each makes STEPS steps."""

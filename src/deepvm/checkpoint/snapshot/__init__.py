"""One consistent picture of the state while training continues. Takes state/, gives chunks to save/."""

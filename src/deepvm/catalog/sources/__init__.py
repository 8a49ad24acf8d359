"""Sources of catalogues: AWS's interfaces and SkyPilot's files in, a catalogue out. ``catalog.update`` calls them."""

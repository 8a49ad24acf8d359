"""Sources of catalogues: AWS, SkyPilot, downloads."""

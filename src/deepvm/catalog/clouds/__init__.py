"""Facts that clouds document and price lists lack: a cloud and a name in; what an expert knows of it out. Pure."""

"""Host memory and threads for copies: staging memory, page sizes, write protection, priorities."""

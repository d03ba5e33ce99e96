"""Worker processes as the daemon sees them: started, switched, watched and ended."""

"""Read calibration and hold-out samples from files, folders or functions, and the processing rules."""

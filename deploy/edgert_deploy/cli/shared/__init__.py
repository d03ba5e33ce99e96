"""Parts that commands share: their options and the types of these, what they print, and work on many devices."""

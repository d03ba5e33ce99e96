"""`edgert fleet ui`: the fleet as a web page, live."""

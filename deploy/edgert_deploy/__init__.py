"""EdgeRT on the host: build checked artifacts, ship them over SSH, watch the fleet."""

"""EdgeRT on the host: build checked artifacts, deploy them over SSH, watch the fleet."""

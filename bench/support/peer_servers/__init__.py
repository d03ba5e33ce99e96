"""Popular servers with the same engine inside, which EdgeRT is compared with."""

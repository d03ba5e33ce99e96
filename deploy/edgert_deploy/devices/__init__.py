"""The devices of a fleet as the host knows them: inventory, profiles, facts, transports."""

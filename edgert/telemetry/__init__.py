"""A model's reports: spans, histograms, alarms, the spool, and the forwarder to MQTT."""

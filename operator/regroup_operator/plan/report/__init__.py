"""The stage of the report: what people read in the status, and the events that go with it."""

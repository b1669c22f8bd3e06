"""Objects that tests start from, valid unless said otherwise. No test lives here."""

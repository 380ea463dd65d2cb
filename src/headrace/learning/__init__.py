"""Value estimators and recurrent modules."""

"""Jobs on a Ray cluster: `launcher` and `carrier` run here, `driver` and `keeper` there."""

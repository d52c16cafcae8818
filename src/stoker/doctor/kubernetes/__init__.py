"""Whether a Kubernetes cluster can run a job: looked at, asked with dry-run, tried with one small pod."""

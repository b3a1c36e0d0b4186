"""Ray from outside: a cluster's job server (`jobs_client`), and a Ray on this machine (`local`, `head`)."""

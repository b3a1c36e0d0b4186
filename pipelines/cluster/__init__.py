"""Clients of Ray: a cluster's job server (`jobs_client`), and a Ray on this machine (`local`, `head`).

A cached rerun imports `jobs_client`, so requests, aiohttp and Ray are imported inside its functions.
"""

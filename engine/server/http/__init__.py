"""What comes before a route: bytes, bodies, names of requests, and the description of all routes.

protocol     connections with bounds on heads, on how slow a client may be, and on what is no HTTP
body         bodies with bounds
request_ids  the name of each request
"""

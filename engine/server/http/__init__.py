"""What comes before a route: bytes, bodies, names of requests, and the description of all routes.

protocol     connections with bounds on heads, on how slow a client may be, and on what is no HTTP
body         bodies with bounds
answered     answers with the names of their requests; what handlers raise is one too
openapi      routes that describe themselves, and the document made of them
"""

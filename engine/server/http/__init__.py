"""The HTTP layer below the routes: connections, bodies, request ids, CORS, the OpenAPI document.

protocol     uvicorn's connection with limits on the size and duration of requests
writing      write the parts of a streamed body without waking a task
body         read request bodies with size limits
answered     request ids in responses, and errors of handlers as responses
origins      CORS: pages of other origins that may use the server
openapi      routes with a description, and the OpenAPI document made from them
"""

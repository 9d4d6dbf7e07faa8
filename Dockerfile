# A compiled model in a container. The first stage builds and installs, the second only runs: it has no compiler,
# no sources and no pip cache, and loads what `intarsia.save` wrote.
#
#   docker build -t intarsia-serve .
#   docker run -p 8000:8000 -v $PWD/model.intarsia:/model.intarsia:ro intarsia-serve
#
# PIP_EXTRA_INDEX_URL may name an index with PyTorch's CPU wheels, which are far smaller on x86_64.

FROM python:3.11 AS build
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN python -m venv /opt/intarsia
RUN /opt/intarsia/bin/pip install --no-cache-dir --constraint constraints.txt ".[all,serve]"

FROM python:3.11-slim
COPY --from=build /opt/intarsia /opt/intarsia
ENV PATH=/opt/intarsia/bin:$PATH PYTHONUNBUFFERED=1
USER nobody
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
# In this form SIGTERM reaches the server itself, which answers what it has taken before it ends.
ENTRYPOINT ["python", "-m", "intarsia.serve"]
CMD ["/model.intarsia", "--host", "0.0.0.0"]

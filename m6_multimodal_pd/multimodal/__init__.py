"""The way of an image, from a part of a chat message to embeddings in a step. Read the files in this order.

Intake, in the call that adds a request (`input_processor.py`):

1. `media_parts.py`: find the images and videos of the messages, and check their keys.
2. Pixels: `fetch.py` reads the bytes of a file or a URL (`fetch_deadline.py`: until a deadline), `decode_image.py` and
   `decode_video.py` decode them within the limits of `MultimodalConfig`.
3. Patches: `vision_processor.py` resizes and cuts (`patches.py`), with the
   settings of the model's files (`processor_settings.py`, `media_settings.py`). `media_reader.py` does steps 1 to 3 of
   one image in one call. Another process may make that call (`media_pool.py`, `media_process.py`, `media_channel.py`);
   then the request waits in the intake (`media_intake.py`).
4. `prompt.py`: write the prompt, with one placeholder token for each embedding.
5. `mrope.py`: compute the positions of all tokens on three axes.
6. `inputs.py`: store the items and positions in the request (`request.py`), and build its key in the prefix cache.

Steps, while the prompt is prefilled (`model_runner.py`, `forward_batch.py`):

7. `encoder_budget.py`: limit the tokens that a step encodes, in the scheduler.
8. `encoder.py`: run the vision tower over the images of the step that are not encoded yet.
9. `embedding_cache.py`: keep the embeddings for later steps and requests.
"""

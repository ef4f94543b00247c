"""Programs of the kinds that Keras' own examples are, with nothing added but the scope.

Each trains on small synthetic data under a strategy, and comes to what it comes to without one.
Steps are written as Keras' guides for its JAX backend write them: as functions of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras_programs as programs
import numpy as np
import pytest
from keras_programs import keras

layers, ops = keras.layers, keras.ops
RNG = np.random.default_rng(0)
ROWS, BATCH = 19, 8
IMAGES = RNG.uniform(size=(ROWS, 8, 8, 1)).astype(np.float32)
LABELS = RNG.integers(0, 3, ROWS).astype(np.int32)
TOKENS = RNG.integers(0, 12, (ROWS, 6)).astype(np.int32)
TARGETS = RNG.normal(size=(ROWS, 1)).astype(np.float32)


def fit(model: keras.Model, *data: Any, epochs: int = 2, **options: Any) -> programs.Outcome:
    history = model.fit(*data, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **options)
    return programs.outcome(model, history.history)


def rate(value: float = 0.05) -> keras.optimizers.Optimizer:
    # Plain SGD: differences in rounding stay small.
    return keras.optimizers.SGD(value, momentum=0.5)


def classify(model: keras.Model) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(rate(), loss, metrics=["sparse_categorical_accuracy"])


def convnet(scope: Any) -> programs.Outcome:
    """Simple MNIST convnet."""
    with scope:
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(4, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dropout(0.5),
                layers.Dense(3),
            ]
        )
        classify(model)
    found = fit(model, IMAGES, LABELS, validation_split=0.1)
    scores = model.evaluate(IMAGES, LABELS, verbose=0, return_dict=True)
    return programs.outcome(model, found.arrays, scores, model.predict(IMAGES, verbose=0))


def resnet(scope: Any) -> programs.Outcome:
    """A residual network with batch normalization."""
    with scope:
        inputs = keras.Input((8, 8, 1))
        x = layers.Conv2D(4, 3, padding="same")(inputs)
        for strides in (1, 2):
            shortcut = layers.Conv2D(4, 1, strides=strides)(x)
            x = layers.Conv2D(4, 3, strides=strides, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
            x = layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
            x = layers.Add()([layers.BatchNormalization()(x), shortcut])
        outputs = layers.Dense(3)(layers.GlobalAveragePooling2D()(x))
        model = keras.Model(inputs, outputs)
        classify(model)
    return fit(model, IMAGES, LABELS)


class PatchEncoder(layers.Layer):
    """Cuts images into patches, and adds what it learns about their places."""

    def __init__(self, num_patches: int, width: int) -> None:
        super().__init__()
        self.num_patches = num_patches
        self.projection = layers.Dense(width)
        self.places = layers.Embedding(num_patches, width)

    def call(self, images: Any) -> Any:
        patches = ops.image.extract_patches(images, 4)
        patches = ops.reshape(patches, (-1, self.num_patches, 16))
        return self.projection(patches) + self.places(ops.arange(self.num_patches))


def attend(x: Any, width: int) -> Any:
    x1 = layers.LayerNormalization(epsilon=1e-6)(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, width // 2)(x1, x1)])
    hidden = layers.Dense(width, activation="gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dense(width)(hidden)])


def vision_transformer(scope: Any) -> programs.Outcome:
    """Image classification with a vision transformer."""
    with scope:
        inputs = keras.Input((8, 8, 1))
        x = attend(PatchEncoder(4, 8)(inputs), 8)
        model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))
        classify(model)
    return fit(model, IMAGES, LABELS)


class Sampling(layers.Layer):
    """Draws from a normal distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        epsilon = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * epsilon


class VAE(keras.Model):
    """A variational autoencoder with a step of its own and three trackers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([layers.Flatten(), layers.Dense(8, activation="relu")])
        self.mean, self.log_variance = layers.Dense(2), layers.Dense(2)
        self.sampling = Sampling()
        self.decoder = keras.Sequential([layers.Dense(64), layers.Reshape((8, 8, 1))])
        names = ("total_loss", "reconstruction_loss", "kl_loss")
        self.trackers = [keras.metrics.Mean(name=name) for name in names]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def call(self, images: Any) -> Any:
        hidden = self.encoder(images)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        return mean, log_variance, self.decoder(self.sampling([mean, log_variance]))

    def losses_of(self, trainable: Any, non_trainable: Any, images: Any) -> Any:
        (mean, log_variance, drawn), non_trainable = self.stateless_call(
            trainable, non_trainable, images
        )
        reconstruction = ops.mean(ops.sum((images - drawn) ** 2, axis=(1, 2, 3)))
        kl = -0.5 * (1 + log_variance - mean**2 - ops.exp(log_variance))
        kl = ops.mean(ops.sum(kl, axis=1))
        return reconstruction + kl, (reconstruction, kl, non_trainable)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        images = data[0] if isinstance(data, tuple) else data
        step = jax.value_and_grad(self.losses_of, has_aux=True)
        (loss, (first, second, non_trainable)), grads = step(trainable, non_trainable, images)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        logs, new_metrics, position = {}, [], 0
        for tracker, value in zip(self.trackers, (loss, first, second), strict=True):
            count = len(tracker.variables)
            own = tracker.stateless_update_state(metrics[position : position + count], value)
            logs[tracker.name] = tracker.stateless_result(own)
            new_metrics += own
            position += count
        return logs, (trainable, non_trainable, optimizer, new_metrics)


def vae(scope: Any) -> programs.Outcome:
    """Variational autoencoder."""
    with scope:
        model = VAE()
        model.compile(rate(0.001))
    return fit(model, IMAGES)


class GAN(keras.Model):
    """A generator and a discriminator, each with its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Flatten(),
                layers.Dense(8),
                layers.LeakyReLU(),
                layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential(
            [keras.Input((4,)), layers.Dense(64), layers.Reshape((8, 8, 1))]
        )
        self.seed_generator = keras.random.SeedGenerator(7)
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile(optimizer=d_optimizer)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.g_optimizer = g_optimizer
        self.optimizer.build(self.discriminator.trainable_variables)
        self.g_optimizer.build(self.generator.trainable_variables)
        # The state of a step has one optimizer: that of the other is state of the model.
        self.g_state = self.g_optimizer.variables
        self.built = True

    @property
    def metrics(self) -> list[Any]:
        return [self.d_tracker, self.g_tracker]

    def call(self, x: Any) -> Any:
        return self.discriminator(x)

    def train_step(self, state: Any, data: Any) -> Any:
        images = data[0] if isinstance(data, tuple) else data
        trainable, non_trainable, optimizer, metrics = state
        num_d = len(self.discriminator.trainable_variables)
        d_vars, g_vars = trainable[:num_d], trainable[num_d:]
        mapping = list(zip(self.non_trainable_variables, non_trainable, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            noise = keras.random.normal((ops.shape(images)[0], 4), seed=self.seed_generator)
        kept = {
            id(v): value if scope.get_current_value(v) is None else scope.get_current_value(v)
            for v, value in mapping
        }
        g_state = [kept[id(v)] for v in self.g_optimizer.variables]

        def judged(d_vars: Any, images: Any) -> Any:
            return self.discriminator.stateless_call(d_vars, [], images)[0]

        def generated(g_vars: Any) -> Any:
            return self.generator.stateless_call(g_vars, [], noise)[0]

        def d_loss(d_vars: Any) -> Any:
            real, fake = judged(d_vars, images), judged(d_vars, generated(g_vars))
            return self.loss_fn(ops.ones_like(real), real) + self.loss_fn(
                ops.zeros_like(fake), fake
            )

        def g_loss(g_vars: Any) -> Any:
            fake = judged(d_vars, generated(g_vars))
            return self.loss_fn(ops.ones_like(fake), fake)

        d_value, d_grads = jax.value_and_grad(d_loss)(d_vars)
        d_vars, optimizer = self.optimizer.stateless_apply(optimizer, d_grads, d_vars)
        g_value, g_grads = jax.value_and_grad(g_loss)(g_vars)
        g_vars, g_state = self.g_optimizer.stateless_apply(g_state, g_grads, g_vars)
        kept.update(zip(map(id, self.g_optimizer.variables), g_state, strict=True))
        non_trainable = [kept[id(v)] for v in self.non_trainable_variables]
        count = len(self.d_tracker.variables)
        first = self.d_tracker.stateless_update_state(metrics[:count], d_value)
        second = self.g_tracker.stateless_update_state(metrics[count:], g_value)
        logs = {
            "d_loss": self.d_tracker.stateless_result(first),
            "g_loss": self.g_tracker.stateless_result(second),
        }
        return logs, ([*d_vars, *g_vars], non_trainable, optimizer, [*first, *second])


def gan(scope: Any) -> programs.Outcome:
    """A generative adversarial network with a step of its own and two optimizers."""
    with scope:
        model = GAN()
        model.compile(rate(), rate(0.02))
    return fit(model, IMAGES)


def bidirectional(scope: Any) -> programs.Outcome:
    """Bidirectional LSTM on text."""
    with scope:
        inputs = keras.Input((None,), dtype="int32")
        x = layers.Embedding(12, 4, mask_zero=True)(inputs)
        x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
        x = layers.Bidirectional(layers.LSTM(3))(x)
        model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
        model.compile(rate(), "binary_crossentropy", metrics=["accuracy"])
    return fit(model, TOKENS, (LABELS > 0).astype(np.float32)[:, None])


class TokenAndPosition(layers.Layer):
    """Embeds tokens and their positions."""

    def __init__(self, length: int, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = layers.Embedding(vocabulary, width)
        self.positions = layers.Embedding(length, width)

    def call(self, x: Any) -> Any:
        return self.tokens(x) + self.positions(ops.arange(ops.shape(x)[-1]))


def text_transformer(scope: Any) -> programs.Outcome:
    """Text classification with a transformer block."""
    with scope:
        inputs = keras.Input((6,), dtype="int32")
        x = attend(TokenAndPosition(6, 12, 8)(inputs), 8)
        x = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x))
        model = keras.Model(inputs, layers.Dense(3)(x))
        classify(model)
    return fit(model, TOKENS, LABELS)


def structured(scope: Any) -> programs.Outcome:
    """Structured data with preprocessing layers."""
    numbers = np.random.default_rng(1).normal(3, 2, (ROWS, 2)).astype(np.float32)
    kinds = TOKENS[:, :1] % 4
    with scope:
        normalize = layers.Normalization()
        normalize.adapt(numbers)
        number, kind = (
            keras.Input((2,), name="number"),
            keras.Input((1,), name="kind", dtype="int32"),
        )
        encoded = layers.CategoryEncoding(4, output_mode="one_hot")(kind)
        x = layers.Concatenate()([normalize(number), encoded])
        x = layers.Dense(4, activation="relu")(x)
        model = keras.Model({"number": number, "kind": kind}, layers.Dense(1)(x))
        model.compile(rate(), "mse")
    return fit(model, {"number": numbers, "kind": kinds}, TARGETS)


def wide_and_deep(scope: Any) -> programs.Outcome:
    """Wide, deep and cross networks, with two inputs."""
    with scope:
        wide, deep = keras.Input((4,), name="wide"), keras.Input((6,), name="deep", dtype="int32")
        x = layers.Flatten()(layers.Embedding(12, 2)(deep))
        x = layers.Dense(4, activation="relu")(layers.BatchNormalization()(x))
        joined = layers.Concatenate()([layers.Dense(2)(wide), x])
        model = keras.Model(
            [wide, deep], [layers.Dense(1, name="main")(joined), layers.Dense(1, name="aux")(x)]
        )
        model.compile(rate(), ["mse", "mae"], loss_weights=[1.0, 0.2])
    numbers = np.random.default_rng(2).normal(size=(ROWS, 4)).astype(np.float32)
    return fit(model, [numbers, TOKENS], [TARGETS, TARGETS])


def denoising(scope: Any) -> programs.Outcome:
    """Convolutional autoencoder for image denoising."""
    with scope:
        inputs = keras.Input((8, 8, 1))
        x = layers.Conv2D(4, 3, activation="relu", padding="same")(inputs)
        x = layers.MaxPooling2D(2, padding="same")(x)
        x = layers.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same")(x)
        model = keras.Model(inputs, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x))
        model.compile(rate(), "binary_crossentropy")
    noisy = np.clip(IMAGES + np.random.default_rng(3).normal(0, 0.1, IMAGES.shape), 0, 1).astype(
        np.float32
    )
    return fit(model, noisy, IMAGES, validation_data=(noisy[:5], IMAGES[:5]))


def siamese(scope: Any) -> programs.Outcome:
    """Siamese network with a contrastive loss."""

    def contrastive(y: Any, distance: Any) -> Any:
        near = (1 - y) * distance**2
        return ops.mean(near + y * ops.maximum(1 - distance, 0) ** 2)

    with scope:
        tower = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Flatten(),
                layers.BatchNormalization(),
                layers.Dense(4, "tanh"),
            ]
        )
        first, second = keras.Input((8, 8, 1)), keras.Input((8, 8, 1))
        distance = layers.Lambda(
            lambda pair: ops.sqrt(ops.sum((pair[0] - pair[1]) ** 2, axis=1, keepdims=True) + 1e-6),
            output_shape=(1,),
        )([tower(first), tower(second)])
        model = keras.Model([first, second], distance)
        model.compile(rate(), contrastive)
    return fit(model, [IMAGES, IMAGES[::-1].copy()], (LABELS > 0).astype(np.float32)[:, None])


def sequence_to_sequence(scope: Any) -> programs.Outcome:
    """Addition as translation: an encoder, a repeated state, a decoder."""
    with scope:
        model = keras.Sequential(
            [
                keras.Input((6, 12)),
                layers.LSTM(6),
                layers.RepeatVector(3),
                layers.GRU(6, return_sequences=True),
                layers.TimeDistributed(layers.Dense(12, activation="softmax")),
            ]
        )
        model.compile(rate(), "categorical_crossentropy", metrics=["accuracy"])
    rows = np.eye(12, dtype=np.float32)[TOKENS]
    return fit(model, rows, rows[:, :3])


class Distiller(keras.Model):
    """Trains a student on labels and on what a teacher says."""

    def __init__(self, student: keras.Model, teacher: keras.Model) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        hard = super().compute_loss(x, y, y_pred, sample_weight, training)
        soft = ops.softmax(self.teacher(x, training=False) / 3, axis=1)
        told = ops.softmax(y_pred / 3, axis=1)
        return 0.1 * hard + 0.9 * ops.mean(keras.losses.kl_divergence(soft, told))


def distillation(scope: Any) -> programs.Outcome:
    """Knowledge distillation."""

    def network(width: int) -> keras.Model:
        return keras.Sequential(
            [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(width, "relu"), layers.Dense(3)]
        )

    with scope:
        teacher = network(8)
        classify(teacher)
        fit(teacher, IMAGES, LABELS, epochs=1)
        model = Distiller(network(4), teacher)
        classify(model)
    return fit(model, IMAGES, LABELS)


EXAMPLES: tuple[Callable[[Any], programs.Outcome], ...] = (
    convnet,
    resnet,
    vision_transformer,
    vae,
    gan,
    bidirectional,
    text_transformer,
    structured,
    wide_and_deep,
    denoising,
    siamese,
    sequence_to_sequence,
    distillation,
)
FAST = (wide_and_deep,)


def run(example: Callable[[Any], programs.Outcome], name: str | None) -> programs.Outcome:
    keras.utils.set_random_seed(3)
    return example(programs.scope_of(name))


@pytest.mark.parametrize(
    "example",
    [pytest.param(e, marks=() if e in FAST else pytest.mark.slow) for e in EXAMPLES],
    ids=lambda example: example.__name__,
)
def test_a_program_of_keras_trains_the_same_with_the_scope_added(example: Any) -> None:
    run(example, "mirrored_2").require_equal(run(example, None), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["virtual_2", "central_2"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)
def test_a_program_of_keras_trains_the_same_under_other_strategies(example: Any, name: str) -> None:
    run(example, name).require_equal(run(example, None), 1e-4)

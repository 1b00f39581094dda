"""Tags of tenants, and what they do to keys."""

from __future__ import annotations

import base64
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendkv.errors import InputError
from blendkv.store.chunkfile import recipe_from_json, recipe_to_json
from blendkv.store.quotas import Quotas
from blendkv.tenants import SALT_VARIABLE, tenant_tag
from blendkv.types import Recipe, as_token_ids, chunk_key

SALT = {SALT_VARIABLE: base64.b64encode(bytes(range(32))).decode()}
OTHER = {SALT_VARIABLE: base64.b64encode(bytes(32)).decode()}
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)


@given(NAMES, NAMES)
def test_a_tag_is_its_tenants_and_its_salts(one, other):
    assert len(tenant_tag(one, SALT)) == 32
    assert tenant_tag(one, SALT) == tenant_tag(one, SALT)
    assert (tenant_tag(one, SALT) == tenant_tag(other, SALT)) == (one == other)
    assert tenant_tag(one, SALT) != tenant_tag(one, OTHER)
    assert one not in tenant_tag(one, SALT) or len(one) < 5


def test_no_name_is_no_tenant_and_needs_no_salt():
    assert tenant_tag(None, {}) == ""


def test_a_name_without_a_salt_is_told_in_one_line():
    with pytest.raises(InputError, match=r"tenant 'acme' was named and BLENDKV_TENANT_SALT is not set") as caught:
        tenant_tag("acme", {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", " ", "a b", "../x", "a/b", "x" * 65, "é", ".a", "a\n"])
def test_names_that_cannot_be(name):
    with pytest.raises(InputError, match="give a name of letters"):
        tenant_tag(name, SALT)


@pytest.mark.parametrize("salt", ["x", "AAAA", base64.b64encode(bytes(31)).decode(), "not base64, but secret!"])
def test_a_salt_that_cannot_be_is_not_repeated(salt):
    with pytest.raises(InputError, match=f"{SALT_VARIABLE} is not 32 bytes in base64") as caught:
        tenant_tag("acme", {SALT_VARIABLE: salt})
    assert salt not in str(caught.value).replace(SALT_VARIABLE, "") or len(salt) < 5


def test_without_a_tenant_keys_and_recipes_are_those_of_the_first_releases():
    """Figures that they computed; stores that they made must go on matching."""
    recipe = Recipe("bos", (1, 7), "bfloat16")
    assert recipe.digest == "8ba50440ad985a23fe0c3707ffc06158"
    key = chunk_key("m", recipe, as_token_ids([1, 2, 3]))
    assert key == "942eb3e12a27f558e90582207adb51879adc44bde878e9200cc2e4c9307a8f07"
    assert set(json.loads(recipe_to_json(recipe))) == {"kind", "prefix", "dtype", "codec"}


@given(st.sampled_from(["", tenant_tag("a", SALT), tenant_tag("b", SALT)]), st.lists(st.integers(0, 9), max_size=3))
def test_a_recipe_with_its_tenant_comes_back(tenant, prefix):
    recipe = Recipe("system", tuple(prefix), "float32", "int8", tenant)
    assert recipe_from_json(recipe_to_json(recipe)) == recipe
    others = {Recipe("system", tuple(prefix), "float32", "int8", tag).digest for tag in ("", "0" * 31 + "1", "f" * 32)}
    assert len(others - {recipe.digest}) >= 2


@pytest.mark.parametrize("tag", ["acme", "A" * 32, "0" * 31, "0" * 33, "g" * 32, "0" * 32 + "\n"])
def test_what_is_no_tag_makes_no_recipe(tag):
    with pytest.raises(InputError, match="no tag of 32 hex digits") as caught:
        Recipe("bos", (), "float32", tenant=tag)
    assert tag not in str(caught.value)


def test_quotas_by_name():
    quotas = Quotas.parse(["acme=10GB", "b=1KB"], "5GB", SALT)
    assert quotas.of(tenant_tag("acme", SALT)) == 10 * 10**9
    assert quotas.of(tenant_tag("b", SALT)) == 1000
    assert quotas.of(tenant_tag("c", SALT)) == 5 * 10**9
    assert quotas.of("") is None
    assert quotas.called(tenant_tag("acme", SALT)) == "acme"
    assert quotas.called("ab" * 16) == "abababababab"
    assert Quotas().of(tenant_tag("acme", SALT)) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["acme"], "not NAME=BYTES"),
        (["acme=ten"], "size 'ten' is not understood"),
        (["a b=1GB"], "give a name of letters"),
        (["a=1GB", "a=2GB"], "two quotas"),
    ],
)
def test_quotas_that_cannot_be(given, message):
    with pytest.raises(InputError, match=message):
        Quotas.parse(given, None, SALT)
    with pytest.raises(InputError, match="give 0 or more"):
        Quotas(others=-1)


def test_quotas_by_name_need_the_salt():
    environ = {name: value for name, value in os.environ.items() if name != SALT_VARIABLE}
    with pytest.raises(InputError, match="is not set"):
        Quotas.parse(["acme=1GB"], None, environ)
    assert Quotas.parse([], "1GB", environ).others == 10**9
